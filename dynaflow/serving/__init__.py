"""What a system that serves requests needs: graphs it calls itself, batches of requests, plans that serve all sizes.

- `host.HostedGraph`: a scheduled graph as the system calls it. Where is a step planned before the first request?
- `host.SerializableGraph`: a captured graph that torch stores on disk and that is scheduled at its first call.
- `host.RaggedBatch`: the requests of one step. Where may it be cut, and what does a part of it look like to operators?
- `host.inject_row_ranges`: replaces operators that read per-batch state of the system by row-aware ones, which get the
  numbers of their rows and run in a context for these rows.
- `scheduler.Serving`: any scheduler, planned once for all batches of about the same size.

Nothing here knows a particular system: those are in `dynaflow.integrations`.
"""
