"""What every other package may import: plans as data, device models, disk cache, fx helpers.

Nothing here knows of Dynamo, schedulers or operators, and nothing here imports a package above it.

`plan` is a schedule as immutable data; `plan_form` checks one without its graph, `plan_text` draws one in the terminal.
`device` describes a GPU, its links and its host in numbers. `disk_cache` stores texts on disk, `bounded` is a
dictionary of limited size. `fx_graphs` copies, inlines and compares fx graphs; `memory_layout` reasons about sizes and
strides. `module_proxy` makes an object that stands for a model. `validate` checks arguments of the public API,
`importing` imports an object by its path. `forks` makes locks that survive a fork. `stats` holds the counters of a
compiled model.
"""
