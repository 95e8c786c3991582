"""Where modules without a test file of their own are tested, or why they are not:

transformers: ../../systems/test_transformers.py
transformers_caches: ../../systems/test_transformers.py
vllm: ../../systems/test_vllm.py
vllm_batches: ../../systems/test_vllm_batches.py
"""
