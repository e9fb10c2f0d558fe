"""The integer program: its ops, its verification and its file format. Imports no torch."""
