import os

os.environ.setdefault("DYNAFLOW_CACHE", "0")  # tests count how often a scheduler is asked
