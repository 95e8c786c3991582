"""Where modules without a test file of their own are tested, or why they are not:

aot: ../training/test_gradients.py, ../capture/test_result_aliasing.py
cuda: ../../gpu/test_cuda.py, since it takes a GPU
distributed: ../schedule/test_rank_consensus.py, ../../distributed/two.py
dynamo: ../engine/test_nested.py, ../test_compiled_model.py
dynamo_patches: ../capture/test_inplace_shapes.py, ../capture/test_torch_modules.py
forks: ../core/test_forks.py
inductor: ../lower/test_compile_ops.py, ../lower/test_first_call.py
random: ../training/test_gradients.py
versions: constants, and types for annotations
"""
