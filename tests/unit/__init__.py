"""Where modules without a test file of their own are tested, or why they are not:

__main__: one line, that calls the commands in cli/
integrations/transformers: ../systems/test_transformers.py
integrations/transformers_caches: ../systems/test_transformers.py
integrations/vllm: ../systems/test_vllm.py
integrations/vllm_batches: ../systems/test_vllm_batches.py
options: test_arguments.py, test_api.py
"""
