"""A form of output: columns with tabs."""

from noiser.results import FORMS, Form


def tabs(result):
    """The table with tabs between columns."""
    return result.to_dataframe().to_csv(sep="\t", index=False)


FORMS.register("tabs", lambda: Form(ending=".tsv", write=tabs), summary="columns with tabs")
