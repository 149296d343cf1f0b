package org.apache.spark.kafka010;

import java.util.Map;
import org.apache.spark.SparkConf;
import scala.Option;

/** No delegation tokens: the broker of a benchmark does not authenticate clients. */
public final class KafkaTokenUtil$ {
    public static final KafkaTokenUtil$ MODULE$ = new KafkaTokenUtil$();

    public Option<KafkaTokenClusterConf> findMatchingTokenClusterConfig(SparkConf conf, String bootstrap) {
        return Option.empty();
    }

    public boolean needTokenUpdate(Map<String, Object> params, Option<KafkaTokenClusterConf> config) {
        return false;
    }
}
