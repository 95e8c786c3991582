"""Where modules without a test file of their own are tested, or why they are not:

decision: test_tuner.py
explain: test_tuner.py
measure: test_tuner.py
profile: test_tuner.py
solver: test_tuner.py
"""
