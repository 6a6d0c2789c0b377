"""From two captures to one verdict: align, measure, judge, locate; each is a pure function of what the store read, and
`compare.Comparison` strings them together, one rank and step at a time. It gives facts: `words` has their sentences,
`comparison.result` makes a `Result` of them. Nothing here knows a framework."""
