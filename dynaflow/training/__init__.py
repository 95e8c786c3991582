"""Training in micro-batches.

- `train_step.TrainStep`: forward and backward of a batch in micro-batches, with the loss and the gradients of the whole
  batch; its plans come from `dynaflow.compile`, one compiled model for each micro-batch in flight.

What else training needs is elsewhere: plans of a backward pass in `capture.joint_graph`, optimizer steps during the
backward pass in `capture.optimizer_steps`, saved tensors in host memory in `capture.offload`.
"""
