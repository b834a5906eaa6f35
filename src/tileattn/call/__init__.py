"""The parts of a call: its facts, inputs and packed sequences, the checks of its arguments, dropout and fp8."""
