"""Read benchmarks: figures, ratios, floors, laws, tables, charts and pages.

It may know reports and nothing that measures. It gives everything that people and checks look at.
"""
