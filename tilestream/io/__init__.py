"""What a call must compute and move: FLOPs and bytes of a Problem, by formulas that the tests count out."""
