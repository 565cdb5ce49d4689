from funcpipe.cli.factories import load_data


def test_data_is_a_factory_or_a_url() -> None:
    assert load_data("s3://texts/tokens?region=eu-central-1") == "s3://texts/tokens?region=eu-central-1"
    assert load_data("collections:OrderedDict")() == {}
