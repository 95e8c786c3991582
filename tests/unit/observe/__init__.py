"""Where modules without a test file of their own are tested, or why they are not:

document: test_timelines.py
files: test_timelines.py
live_report: test_recording.py
page: test_timelines.py, ../../browser/test_page.py
perfetto: test_recording.py
recorded: test_recording.py
summary: test_timelines.py
"""
