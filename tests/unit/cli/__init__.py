"""Where modules without a test file of their own are tested, or why they are not:

arguments: test_cli.py, test_commands.py
bench: test_commands.py
demo: test_commands.py
doctor: test_commands.py
names: test_cli.py, test_commands.py
output: test_commands.py
plan: test_commands.py
plan_for_device: ../cost/test_simulate.py
recorded_run: test_commands.py
run: test_commands.py
simulate: test_cli.py, test_commands.py
trace: test_commands.py
tune: test_cli.py, test_commands.py
view: ../observe/test_timelines.py
"""
