"""The exact search for the best plan: an idea in each file, to be read in this order; docs/planning.md has the reasons.

1. `option_network`: the stages that plans may have as a network, in which a plan is a path; what a path takes.
2. `spaces`: the networks that are searched, one for each setting (replicas, schedule).
3. `initial_bounds`: least sums along paths; the range of seconds of a space, and good plans to begin with.
4. `incumbents`: the best plans known, and from which dollars on a plan is not worth finding.
5. `time_window`: plans whose seconds lie between two limits; bounds on them, and options that none of them needs.
6. `labels`: partial plans, from some stage to the last; `completion_bounds`: what any completion takes at least.
7. `dominance`: labels that another one makes useless.
8. `label_search`: all labels of a window, or a few to find a good plan, or merged ones to see which options are needed.
9. `search`: the queue of windows, which ends with a proof. `exact` is the way in, and says why there is no plan.

`exhaustive` prices every plan: the search is tested against it. By hand, for a model of two layers and one size:

    network      2 ──[0,1)── 1 ──[1,2)── 0       a plan is a path from node 2 to node 0, a stage an option on it
                 └────────[0,2)──────────┘

    first look   plans take 4 to 10 s; a second costs 2 $ or more up to 6 s, and 1 $ or more later; the path of the
                 plan with one stage takes 7.5 s at 1 $/s: the best plan known costs 7.5 $

    windows      4 s             6 s            7.5 s            10 s
                 ├── 8 $ or more ──┼── 6 $ or more ──┼── 7.5 $ or more ──┤       one is left, from 6 to 7.5 s

    labels       node 0: the empty plan    node 1: [1,2)    node 2: [0,1) in front of that, 7 s for 7.2 $; and [0,2)

    proof        nothing below 7.2 $ is left in any window: the plan with two stages is optimal
"""
