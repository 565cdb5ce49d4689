"""What is asked of the planner: profile, platform and goal, the stage graph, and the options of each stage."""
