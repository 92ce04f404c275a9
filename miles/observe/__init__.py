"""Metrics, events and snapshots of a run go in; a live view, a run folder, plots, a report and trackers come out.

    finished groups ──▶ rollout_metrics ──▶ Observer ──▶ RunFolder   settings.json, metrics.jsonl, events.jsonl
                        eval_metrics            │
                                                ├──▶ LiveView     a panel on a terminal, plain lines elsewhere
                                                ├──▶ trackers     tensorboard
                                                └──▶ at the end   plots/*.png, report.html (from the run folder alone)

The axis of training steps counts steps that have ended: 0 is the untrained policy, the first step logs 1.
"""
