"""Where modules without a test file of their own are tested, or why they are not:

scheduler: test_host.py
"""
