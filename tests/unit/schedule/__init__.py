"""Where modules without a test file of their own are tested, or why they are not:

base: test_context.py, ../strategies/test_strategies.py
check: ../core/test_plan.py
fusion: test_context.py, ../lower/test_fuse_tasks.py
op_item: test_context.py
plan_recorder: test_context.py
"""
