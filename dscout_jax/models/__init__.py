"""Target and drafter: linen modules behind pure functions."""
