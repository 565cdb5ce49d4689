"""The problem that the planner is given: profile, platform and goal, the stage graph, and the options of each stage."""
