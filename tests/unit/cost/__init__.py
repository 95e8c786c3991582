"""Where modules without a test file of their own are tested, or why they are not:

costs: test_simulate.py
kernels: test_work.py
simulation: test_simulate.py
"""
