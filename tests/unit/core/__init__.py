"""Where modules without a test file of their own are tested, or why they are not:

chrome_trace: ../observe/test_recording.py, ../observe/test_timelines.py
critical_path: ../observe/test_timelines.py
device: ../cost/test_simulate.py
module_proxy: ../test_compiled_model.py
"""
