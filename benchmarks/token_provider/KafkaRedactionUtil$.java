package org.apache.spark.kafka010;

import scala.collection.immutable.Seq;

/** Parameters as they are: there are no secrets among those of a benchmark. */
public final class KafkaRedactionUtil$ {
    public static final KafkaRedactionUtil$ MODULE$ = new KafkaRedactionUtil$();

    public <T> Seq<T> redactParams(Seq<T> params) {
        return params;
    }
}
