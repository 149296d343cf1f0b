package org.apache.spark.kafka010;

/** The configuration of a cluster that gives tokens; there is none. */
public final class KafkaTokenClusterConf {
    private KafkaTokenClusterConf() {}
}
