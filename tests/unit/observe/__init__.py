"""Where modules without a test file of their own are tested, or why they are not:

document: test_timelines.py
live_report: test_recording.py
page: test_timelines.py, ../../browser/test_page.py
readers: test_timelines.py
recorded_plan: test_recording.py
recording_trace: test_recording.py
summary: test_timelines.py
"""
