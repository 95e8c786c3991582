"""Where modules without a test file of their own are tested, or why they are not:

aten_calls: test_row_rules.py
compute_rules: test_row_rules.py
custom_op_rules: ../test_op_registry.py
dtensor_rules: test_row_rules.py
higher_order_rules: ../test_higher_order.py
module_rules: ../test_torch_modules.py
fake_run: test_probe.py and test_probe_memo.py
node_facts: test_probe.py
observer: test_probe.py and test_row_rules.py
signatures: test_row_rules.py
view_rules: test_row_rules.py
"""
