"""What operators cost: arithmetic, memory traffic and time, and the simulated timeline of a plan.

An operator runs once on fake tensors, without a device. `work` returns its `Work`, the list of `Kernel`s that Inductor
would launch; `kernels` derives them from the aten calls. `costs` turns kernels into time on a device model
(`core.device`), corrected by measurements, as `Phase`s that use the same resources. `contention` says how concurrent
tasks share a resource. `simulate` runs a plan against these costs, and `simulation` holds the resulting timeline.
"""
