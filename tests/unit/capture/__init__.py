"""Where modules without a test file of their own are tested, or why they are not:

captured_graph: test_serialize.py, test_dynamic_dims.py, ../test_arguments.py
dtensor_inputs: ../../distributed/two.py, since it takes ranks
gradient_paths: ../training/test_gradients.py
joint_graph: ../training/test_gradients.py
offload: ../strategies/test_prefetch.py, ../training/test_memory.py
optimizer_steps: test_optimizer_ops.py
saved_offload: ../training/test_memory.py
trace_conditions: ../training/test_gradients.py, test_result_aliasing.py
"""
