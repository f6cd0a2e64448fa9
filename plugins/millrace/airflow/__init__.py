"""What the DAGs need from Airflow: task bodies, operators, retry rules, the form's fields and the manual.

`tasks` and `operators` import at call time what needs a database, Spark or pyarrow, so that the DAG processor stays quick.
"""
