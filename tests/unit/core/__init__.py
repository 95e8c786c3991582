"""Where modules without a test file of their own are tested, or why they are not:

device: ../cost/test_simulate.py
module_proxy: ../test_compiled_model.py
"""
