"""Where modules without a test file of their own are tested, or why they are not:

build: test_models.py, test_named_models.py
diffusion: test_named_models.py
inception: test_named_models.py
parallel: test_named_models.py
table: test_named_models.py
"""
