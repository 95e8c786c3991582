"""Where modules without a test file of their own are tested, or why they are not:

analyzed_graph: test_plan_cache.py
engine: test_fallback.py, test_nested.py
plan_maker: test_plan_cache.py, ../schedule/test_context.py
planner: test_plan_cache.py, ../schedule/test_context.py
recorder: ../observe/test_recording.py
runner: test_frames.py, test_fallback.py
scheduler_chain: ../strategies/test_strategies.py, test_frames.py
user_code: ../test_errors.py
"""
