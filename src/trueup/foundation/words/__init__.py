"""Sentences from facts: every text of a verdict that a person reads is made here; what decides looks at the facts.

`reasons` says a `facts.why.Reason` by its template, `sentence` a finding and a verdict, `anomaly_sentence` what overflows and the
history of a loss scale; `wording` writes numbers and foreign text. Imports facts alone (`model`,
`facts`, results that hold nothing else); everything may import it.
"""
