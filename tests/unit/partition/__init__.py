"""Where modules without a test file of their own are tested, or why they are not:

op_graph: test_build.py
"""
