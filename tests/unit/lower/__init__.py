"""Where modules without a test file of their own are tested, or why they are not:

codegen: ../core/test_plan.py (golden code), test_fuse_tasks.py
executable: test_fuse_tasks.py, ../test_errors.py
lower: test_memory.py, test_compile_ops.py
out_variants: test_compile_ops.py, ../_torch/ops/test_ops.py
program: test_fuse_tasks.py, test_memory.py
segments: test_fuse_tasks.py
steps: dataclasses alone
timing: ../observe/test_recording.py
"""
