"""What ran, and what it tells: recordings, timelines, reports, and the page that draws them.

- `recording.record`: records the calls of compiled models; `recorded_plan.RecordedPlan`: the calls of one plan.
- `document.Document`: a timeline as data. `timelines` makes it from plans, simulations and runs; `readers` from files.
- `summary.summarize`: the critical path, and why lanes were idle. `report.Report`: how close a run is to its bound, and
  what it loses; `live_report` makes one for given inputs.
- `page`: timelines as one HTML file. `recording_trace`: a recording as a trace in Chrome's format, whose writer is
  `core.chrome_trace`.

A model that only runs imports none of this.
"""
