"""Objectives and solvers: small pure functions, no state."""
