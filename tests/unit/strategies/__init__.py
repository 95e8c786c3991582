"""Where modules without a test file of their own are tested, or why they are not:

auto: ../tune/test_tuner.py
candidates: test_strategies.py
choice: test_strategies.py
comet: test_strategies.py
comm_overlap: test_strategies.py
dual_batch: test_strategies.py
fused: test_strategies.py
nanoflow: test_strategies.py
optimizer_overlap: ../capture/test_optimizer_ops.py
sequential: test_strategies.py
solver: test_strategies.py
token_weave: test_strategies.py
"""
