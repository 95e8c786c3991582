"""Where modules without a test file of their own are tested, or why they are not:

cuda_lanes: test_cpu_lanes.py, ../../gpu/test_cuda.py
sm_partitions: test_cpu_lanes.py, ../../gpu/test_partitions.py
"""
