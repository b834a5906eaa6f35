"""The heads of a group dealt to several blocks of the main kernel, where there are few kv heads.

`waves` predicts the time of each number of shares, `choice` applies it to a call, and `add` is the kernel that adds the
shares' parts of dk and dv. `order` asks the same model in which order the heads' blocks should start.
"""
