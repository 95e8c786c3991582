"""Where modules without a test file of their own are tested, or why they are not:

__main__: one line, that calls the commands in cli/
"""
