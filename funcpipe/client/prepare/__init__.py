"""All that comes before a run: arguments, data, profile, estimate, trials of the first step, and the stages to send."""
