package org.apache.spark.kafka010;

import java.util.HashMap;
import java.util.Map;
import scala.Option;
import scala.collection.Iterator;
import scala.Tuple2;

/** A consumer's parameters, as the connector puts them together. */
public final class KafkaConfigUpdater {
    private final Map<String, Object> params = new HashMap<>();

    public KafkaConfigUpdater(String module, scala.collection.immutable.Map<String, Object> initial) {
        Iterator<Tuple2<String, Object>> each = initial.iterator();
        while (each.hasNext()) {
            Tuple2<String, Object> pair = each.next();
            params.put(pair._1(), pair._2());
        }
    }

    public KafkaConfigUpdater set(String key, Object value) {
        params.put(key, value);
        return this;
    }

    public KafkaConfigUpdater setIfUnset(String key, Object value) {
        params.putIfAbsent(key, value);
        return this;
    }

    public KafkaConfigUpdater setAuthenticationConfigIfNeeded() {
        return this;
    }

    public KafkaConfigUpdater setAuthenticationConfigIfNeeded(Option<KafkaTokenClusterConf> config) {
        return this;
    }

    public Map<String, Object> build() {
        return params;
    }
}
