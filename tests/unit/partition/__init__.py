"""Where modules without a test file of their own are tested, or why they are not:

grouped_graph: test_build.py, test_partition.py
op_graph: test_build.py
split_refusals: test_partition.py, test_splittable_rules.py
subgraph: test_build.py
"""
