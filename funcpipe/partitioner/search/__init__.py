"""The exact search for the best plan. Read the modules in this order; docs/planning.md explains the whole method.

- `option_network`: the stages that plans may have, laid out for computing along paths; what a path takes.
- `spaces`: one network for each setting (replicas, schedule, synchronisation).
- `shortest_paths`: least sums along paths, for many weights and for several caps on the slowest lane at once.
- `initial_bounds`: a first look at a network, which finds good plans and the range of seconds to search.
- `incumbents`: the best plans known, and from which dollars on a plan is not worth finding.
- `time_window`: plans whose seconds lie between two limits; bounds on them, and options that none of them needs.
- `completion_bounds`, `dominance`, `labels`: the search inside a window, partial plan by partial plan.
- `search`: the queue of windows, which ends with a proof. `exact` is the way in.
- `exhaustive` prices every plan and is what the search is tested against; `infeasible` says why there is no plan.
"""
