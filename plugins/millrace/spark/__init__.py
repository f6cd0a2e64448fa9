"""What the Spark applications do: verbs from table to table. Only the driver imports this; executors run Spark SQL alone."""
