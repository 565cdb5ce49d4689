"""Plans explained and compared: what limits them, the second best, trade-offs between time and money, what-if."""
