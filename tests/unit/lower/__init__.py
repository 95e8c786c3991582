"""Where modules without a test file of their own are tested, or why they are not:

bind: test_passes.py
emit: ../core/test_plan.py, test_fuse_tasks.py
executable: test_fuse_tasks.py, ../test_errors.py
ir: test_passes.py
liveness: test_passes.py
lower: test_memory.py, test_compile_ops.py
out_variants: test_compile_ops.py, ../_torch/ops/test_ops.py
segments: test_fuse_tasks.py
timing: ../observe/test_recording.py
whole_graph: test_compile_ops.py
"""
