"""Where modules without a test file of their own are tested, or why they are not:

arguments: test_commands.py, test_cli.py
bench: test_commands.py, test_cli.py
demo: test_commands.py, test_cli.py
doctor: test_commands.py, test_cli.py
measured: test_commands.py, test_cli.py
names: test_commands.py, test_cli.py
output: test_commands.py, test_cli.py
plan: test_commands.py, test_cli.py
plan_for_device: ../cost/test_simulate.py
run: test_commands.py, test_cli.py
simulate: test_commands.py, test_cli.py
trace: test_commands.py, test_cli.py
tune: test_commands.py, test_cli.py
view: ../observe/test_timelines.py
"""
