"""Models by name, for the command line, benchmarks and docs: random weights, or only shapes on "meta".

- `table`: the named models as data. `build`: makes one, or one from a folder with a config.json, and inputs for it.
- `parallel`: a model's shard on one of several GPUs, with the collectives that it has, for planning and simulation.
- `inception`, `diffusion`: models of this package; all others are classes of transformers.
"""
