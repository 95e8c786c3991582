"""Where modules without a test file of their own are tested, or why they are not:

draws: ../../training/test_gradients.py
embedding_bag: ../../capture/test_torch_modules.py
gradients: test_ops.py
offload: test_ops.py
optimizer: test_ops.py
out_variants: test_ops.py
recurrent: test_ops.py
"""
