"""What a call is: its facts, its sequences, what is checked about it, dropout and fp8."""
